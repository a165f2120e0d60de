"""A kernel-resident MLX engine for notebooks, with a prefix-trie KV cache shared by all cells."""

__version__ = "0.1.0"
