"""Copies between one CUDA device and host memory, beside the training.

Order is kept by streams and events, never by waiting for the device on the training thread:

* Down: the parameters are cloned on the device, on the stream that the training uses, so after
  whatever it queued there and before whatever it queues next (the next optimizer step). A side
  stream waits for the clones and copies them out while the training goes on. Making the training
  wait for the copy out instead would stall the device for the whole transfer, 20 to 50 times a
  clone's time. When there is no memory for the clones that is what happens.
* Up: a side stream copies to new device tensors, and the calling thread waits until they are
  complete: never the one that trains, but when parameters became NaN. What the training stream does
  with them later needs no event; it only must tell the allocator that it uses them. Without memory
  for them the host's arrays are all there is, and the training waits while it copies from these.

Whoever waits does not spin: the processor is the training's. All is done with the copies' device as
the current one. A thread begins with device 0, and leaving a stream of another device sets the one
before again, which would give it a context: hundreds of MB on a GPU that is perhaps not ours.

``torch.cuda`` is an argument: a test may pass one that records what is asked of it.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any


class DeviceCopies:
    """The side streams of one device. ``download`` and ``upload`` may run at the same time."""

    def __init__(self, cuda: Any, device: Any) -> None:
        """Make the streams; ``cuda`` is ``torch.cuda`` or stands in for it."""
        self._cuda = cuda
        self._device = device
        self._down = cuda.Stream(device)
        self._up = cuda.Stream(device)
        # What copies under way write to, by the event that ends them: kept from reuse even if
        # nobody waits for them.
        self._under_way: dict[Any, Sequence[Any]] = {}

    def download(self, sources: Sequence[Any], hosts: Sequence[Any]) -> Callable[[], None]:
        """Copy ``sources`` as they are now into ``hosts`` (pinned, to run on beside the training).

        Training thread. The copy is complete when the returned function has returned.
        """
        done = self._cuda.Event(blocking=True)
        with self._cuda.device(self._device):
            for event in tuple(self._under_way):
                if event.query():
                    self._under_way.pop(event, None)
            current = self._cuda.current_stream(self._device)
            clones = self._clones(sources)
            self._down.wait_stream(current)
            # Both before the first copy: an error or Ctrl-C may come between two.
            self._used_on(clones or (), self._down)
            self._under_way[done] = hosts
            try:
                with self._cuda.stream(self._down):
                    for source, host in zip(clones or sources, hosts, strict=True):
                        host.copy_(source, non_blocking=True)
            finally:
                done.record(self._down)
            if clones is None:
                current.wait_event(done)

        def wait() -> None:
            with self._cuda.device(self._device):
                done.synchronize()
            self._under_way.pop(done, None)

        return wait

    def upload(self, hosts: Sequence[Any]) -> list[Any]:
        """Device copies of ``hosts``, complete on return; ``hosts`` if the device has no room.

        Any thread; it waits for the copies.
        """
        done = self._cuda.Event(blocking=True)
        with self._cuda.device(self._device):
            with self._cuda.stream(self._up):
                try:
                    staged = [host.to(self._device, non_blocking=True) for host in hosts]
                except self._cuda.OutOfMemoryError:
                    staged = list(hosts)
                done.record(self._up)
            done.synchronize()
        return staged

    def use(self, staged: Sequence[Any]) -> None:
        """Say that the stream of the calling (training) thread reads what ``upload`` returned."""
        self._used_on(staged, self._cuda.current_stream(self._device))

    def _clones(self, sources: Sequence[Any]) -> list[Any] | None:
        """Contiguous copies on the current stream, None when the device has no room for them."""
        try:
            return [source.new_empty(source.shape).copy_(source) for source in sources]
        except self._cuda.OutOfMemoryError:
            return None

    @staticmethod
    def _used_on(tensors: Sequence[Any], stream: Any) -> None:
        """Keep the allocator from handing out these tensors' memory while ``stream`` reads it."""
        for tensor in tensors:
            tensor.record_stream(stream)


def pinned_memory(torch: Any, nbytes: int) -> memoryview:
    """Fresh host memory that a CUDA device copies from and to by itself."""
    block = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu", pin_memory=True)
    memory: Any = (ctypes.c_ubyte * block.numel()).from_address(block.data_ptr())
    memory.block = block  # the view keeps the ctypes array alive, and that the tensor
    return memoryview(memory).cast("B")
