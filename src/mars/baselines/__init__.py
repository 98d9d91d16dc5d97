"""Methods of others, on our engine, to compare with."""
