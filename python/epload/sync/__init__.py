"""Live weight sync: a running trainer hands its weights to ranks of other jobs, again and again."""
