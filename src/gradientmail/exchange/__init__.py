"""What nodes say to each other through the mailbox: keys, records, payloads, verbs."""
