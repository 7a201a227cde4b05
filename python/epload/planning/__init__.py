"""Plans which ranks read or send what, and what each rank takes of it. Pure."""
