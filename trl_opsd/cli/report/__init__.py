"""The command `trl-opsd report`: the page of a run, from what is in its folder."""
