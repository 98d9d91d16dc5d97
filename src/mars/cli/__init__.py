"""The `mars` command. Its modules import nothing heavy until a command runs."""
