"""The backend's tables do not depend on the default dtype that a user sets before the import."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os
    import sys
    import torch

    for name in sys.argv[1:]:  # importing torch in each anew would take most of the time
        child = os.fork()
        if not child:
            torch.set_default_dtype(getattr(torch, name))
            break
        if os.waitpid(child, 0)[1]:
            sys.exit(f"with {name}")
    else:
        sys.exit()
    from gradientmail.backend.torch import TorchBackend

    backend = TorchBackend()
    exact = [0.0, 0.5, -0.5, 1.0, -1.5, 2.0, -3.0, 4.0, 6.0, -6.0]
    x = torch.tensor(exact, dtype=torch.float32)
    for dtype, stored, size, scale in (
        ("F4", torch.uint8, 16, torch.zeros(1, dtype=torch.uint8)),
        ("F8_E4M3", torch.float8_e4m3fn, 10, torch.zeros((), dtype=torch.float32)),
    ):
        data, back = torch.zeros(size, dtype=stored), torch.empty(10, dtype=torch.float32)
        backend.encode(x, dtype, data, scale)
        backend.decode(data, dtype, scale, back)
        assert back.tolist() == exact, (dtype, back)
    out = torch.empty(10, dtype=torch.float32)
    backend.combine([(0.5, x), (1.0, x)], out)
    assert out.tolist() == [1.5 * value for value in exact]
    assert backend.sum_of_squares(x) == sum(value**2 for value in exact)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_tables_are_fp32_whatever_the_default_dtype_is() -> None:
    """``torch.set_default_dtype(torch.bfloat16)`` before the first session is common."""
    kinds = ["bfloat16", "float16", "float64"]
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), *kinds]
    done = subprocess.run(program, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
