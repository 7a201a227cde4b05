"""Lets ranks agree, exchange small messages and learn that another rank failed, over the process group's store."""
