"""The command `trl-opsd report`: the page of a run, from the files in its folder."""
