"""The IPython side: grammar, magics, display."""
