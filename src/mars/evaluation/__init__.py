"""What measurements have in common: the machine they ran on, and how answers are compared."""
