"""The functions and transforms of the built-in models, and a command that downloads the models' weights."""
