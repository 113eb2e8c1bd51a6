"""Settings of all tests: how many random examples, and that a failure can be repeated."""

import os

from hypothesis import HealthCheck, settings

# Speed varies with what else the machine is doing, so no example has a deadline. On failure the
# example itself and the blob that repeats it are printed.
settings.register_profile(
    "here",
    max_examples=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# In CI a change must not fail for an example that has nothing to do with it.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
