"""One node as a process: trains in sessions until it is told to stop. Run by the tests.

Arguments: folder (or the URL of a bucket and prefix), learner id, and how many rounds to see before
it closes (0: until killed). Prints ``joined`` when it has joined, and at the end ``closed <newest
round> <digest of the parameters>``.
"""

import hashlib
import sys

from tests.processes.learning import learn, warm
from tests.processes.stores import store_at


def main(root: str, learner: str, rounds: int) -> None:
    """Train."""
    slowness = 5 if root.startswith("http://") else 1  # a request costs more than a file
    session, model = learn(
        store_at(root),
        learner,
        rounds,
        pause=0.02,
        poll_interval=0.02 * slowness,
        lease_every=0.25 * slowness,
        lease_timeout=1.0 * slowness,
    )
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    print(f"closed {session.rounds_seen} {digest.hexdigest()}", flush=True)


def serve() -> None:
    """Fork a node for every line of standard input, so that torch is imported once.

    A line is the three arguments; a line ``kill <learner>`` sends SIGKILL. Answers ``pid <id>``.
    """
    import os
    import signal

    warm()
    if sys.argv[2:] == ["s3"]:
        store_at("http://127.0.0.1:1/bucket/prefix")  # so does boto3
    nodes: dict[str, int] = {}
    for line in sys.stdin:
        match line.split():
            case ["kill", learner]:
                os.kill(nodes[learner], signal.SIGKILL)
                os.waitpid(nodes.pop(learner), 0)
                print("killed", flush=True)
            case ["start", root, learner, rounds, out]:
                pid = os.fork()
                if pid == 0:
                    sys.stdin.close()
                    target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(target, 1)
                    os.dup2(target, 2)
                    code = 1
                    try:
                        main(root, learner, int(rounds))
                        code = 0
                    except BaseException:
                        import traceback

                        traceback.print_exc()
                    finally:
                        sys.stdout.flush()
                        sys.stderr.flush()
                        os._exit(code)
                nodes[learner] = pid
                print(f"pid {pid}", flush=True)
            case ["wait", learner]:
                _, status = os.waitpid(nodes.pop(learner), 0)
                print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)
    for pid in nodes.values():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
