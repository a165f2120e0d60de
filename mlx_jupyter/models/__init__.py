"""From a name to something that can run."""
