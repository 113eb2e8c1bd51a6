"""What the numbers become: configuration, schedule, partition, merge, outer step, precision.

Pure functions and values over a backend's arithmetic. Nothing here knows keys, bytes or stores,
and nothing here imports a framework.
"""
