"""Where bytes come from: files and state dicts, behind one interface."""
