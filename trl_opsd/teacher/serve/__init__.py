"""A server for a teacher of any architecture: `python -m trl_opsd.teacher.serve MODEL`, in vLLM's pooling protocol."""
