"""Loads. Each load of a :class:`~epload.loading.loader.HierarchicalLoader` takes five steps:

1. Open: ``inputs`` reads the model and opens the checkpoint on each rank that reads.
2. Plan: ``agreement`` brings all ranks to one plan, by the messages in ``agreed``. ``differences`` says where ranks disagree,
   ``hints`` where keys and shapes do not match, ``tied`` compares tied weights, ``missing`` and ``buffers`` compute and find what
   no checkpoint fills.
3. Prepare: ``run`` resolves the route (``routes``), reserves staging memory (``resources``) and materializes the model.
4. Move: ``engines`` makes the engine, which reads, sends and unpacks.
5. Finish: ``run`` verifies the shards if asked to, fills what is missing, and ends in a round in which all ranks succeed or fail.
"""
