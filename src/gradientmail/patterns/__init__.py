"""What nodes of a run do together beside training, over the same mailbox.

* ``barrier``: wait until so many nodes have come to one point.
* ``shared_queue``: units of work that each go to one node.

Both are ordinary blocking calls, which work inside a running event loop as well, and need no
session: a node that has one keeps its lease meanwhile.
"""
