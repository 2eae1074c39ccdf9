"""From rows of a dataset to the token ids of student and teacher."""
