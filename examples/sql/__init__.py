"""Questions about databases whose tables have names that tell nothing: what they hold, only the teacher reads."""
