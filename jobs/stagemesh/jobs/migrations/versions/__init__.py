"""The migrations, each in a module of its own."""
