"""Commands on pipeline files: check, draw, import, deploy, fetch their models, and write new stages."""
