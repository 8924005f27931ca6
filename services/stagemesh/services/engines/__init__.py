"""What computes: one folder an engine, each with a light card and a factory that imports the rest."""
