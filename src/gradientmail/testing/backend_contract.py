"""The tests that every backend passes. Needs pytest and numpy.

Subclass ``BackendContract`` under a name that pytest collects, and give it the backend and its
models::

    class TestMyBackend(BackendContract):
        def make_backend(self):
            return MyBackend()

        def make_model(self, tensors):
            model = MyModel()
            for name, (dtype, values) in tensors.items():  # "F32", "F16", "BF16"; numpy fp32
                model.add(name, my_array(values).astype(dtype))
            return model

        def read_model(self, model):
            return {name: to_numpy_fp32(x) for name, x in model.items()}

Each test calls ``make_backend`` as often as it needs one; it may always give the same. What is
encoded and decoded is compared byte by byte with the tables of the formats, so two backends that
pass write the same bytes. For the values in a failed assertion, call
``pytest.register_assert_rewrite("gradientmail.testing")`` in ``conftest.py``.
"""

from gradientmail.backend.base import Backend
from gradientmail.testing.backend_arithmetic import BackendArithmetic
from gradientmail.testing.backend_formats import BackendFormats
from gradientmail.testing.backend_parameters import BackendParameters
from gradientmail.testing.backend_range import BackendRange
from gradientmail.testing.backend_sums import BackendSums


class BackendContract(
    BackendFormats, BackendArithmetic, BackendSums, BackendRange, BackendParameters
):
    """Tests of what ``gradientmail.backend.base`` states."""

    def test_is_a_backend(self) -> None:
        """With a name, which events and errors show."""
        backend = self.make_backend()
        assert isinstance(backend, Backend)
        assert isinstance(backend.name, str)
        assert backend.name
