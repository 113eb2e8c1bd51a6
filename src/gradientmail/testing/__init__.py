"""What GradientMail's own tests are made of, for people who write a mailbox or a backend.

* ``virtual_time``: hours of an asyncio program in milliseconds, the same every time.
* ``faults``: mailboxes that fail, hang, are slow or count, around any other.
* ``simulated``: one store seen by many nodes over links that are slow, unreliable or cut.
* ``mailbox_contract``: the tests that every mailbox passes (needs pytest and hypothesis).
* ``backend_contract``: the tests that every backend passes (needs pytest and numpy).
* ``world``: nodes in one thread; ``plans`` and ``schedules``: what happens to them, from a seed;
  ``recording``: a store that checks every invariant of the protocol at every write and delete.
"""
