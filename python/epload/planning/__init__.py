"""Who reads what, and what each rank takes of it. Pure."""
