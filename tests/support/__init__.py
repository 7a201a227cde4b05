"""Code that several test modules share, one subject a file. Test modules import from here, never from one another."""
