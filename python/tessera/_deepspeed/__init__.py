"""Checkpoints in DeepSpeed's layouts, read in place and written, without DeepSpeed. See docs/checkpoints.md."""
