"""``epload bench``: the command, and what each of its ranks runs."""
