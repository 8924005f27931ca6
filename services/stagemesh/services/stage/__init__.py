"""The stage service: a servicer that translates and a runtime that decides."""
