"""The `stagemesh` command. Each room contains a group of subcommands."""
