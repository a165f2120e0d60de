"""Runs requests on one thread; knows no IPython."""
