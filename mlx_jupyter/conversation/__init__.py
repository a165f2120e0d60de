"""Turns, branches and answers as plain data; knows no IPython and no MLX."""
