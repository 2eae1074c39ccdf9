"""`trl-opsd audit`: whether a teacher will help, before a training."""
