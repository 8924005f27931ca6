"""Descriptors of plug-ins (engines, functions, transforms, codec models, connectors), and their entry points."""
