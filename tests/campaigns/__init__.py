"""Programs with make targets of their own: long runs with random faults, inputs or models, each judged."""
