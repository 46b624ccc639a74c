"""The command line: one small module per group of commands. Heavy packages are imported inside commands."""
