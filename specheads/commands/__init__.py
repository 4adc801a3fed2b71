"""The command lines: configs, help, exit codes."""
