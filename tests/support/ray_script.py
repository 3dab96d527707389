"""recipes/ray_train.py as it is, on a cluster of Ray on this machine, from which a worker or a node is taken.

    python ray_script.py worker|node FOLDER [FLAGS OF THE RECIPE]

In:   what is taken: the process of a `worker`, or one of two nodes (`node`).
Out:  Ray's result as JSON in `FOLDER/result.json`, or its error.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

RECIPES = str(Path(__file__).resolve().parents[2] / "recipes")
sys.path.insert(0, RECIPES)
import ray_train  # noqa: E402

recipe = ray_train.train
STEP_OF_LOSS = 10


def train_and_count(options: dict[str, Any]) -> None:
    """The function of the recipe; prints what Ray's callback copies."""
    import shutil

    copy = shutil.copytree

    def copytree(source: Any, target: Any, *given: Any, **more: Any) -> Any:
        size = sum(file.stat().st_size for file in Path(source).rglob("*") if file.is_file())
        sys.stderr.write(f"rank {os.environ['RANK']} copies {Path(source).name}, {size} bytes\n")  # Ray doubles prints
        return copy(source, target, *given, **more)

    shutil.copytree = copytree
    recipe(options)


def main() -> None:
    what, folder, *words = sys.argv[1:]
    flags = ray_train.parse(["--storage_path", folder, *words])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    other = cluster.add_node(num_cpus=2) if what == "node" else None
    paths = os.pathsep.join([os.environ["PYTHONPATH"], RECIPES])
    ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    out = Path(folder, flags.name, "trainer")

    def take_worker() -> None:
        wait_for(out / f"checkpoint-{STEP_OF_LOSS}")
        started = psutil.Process().children(recursive=True)
        [*_, worker] = (each for each in started if "RayTrainWorker" in title(each))
        worker.kill()

    def take_node() -> None:
        wait_for(out / f"checkpoint-{STEP_OF_LOSS}")
        cluster.remove_node(other, allow_graceful=False)

    threading.Thread(target=guarded(take_worker if what == "worker" else take_node), daemon=True).start()
    ray_train.train = train_and_count
    try:
        result = ray_train.run(flags)
        answer = {"metrics": result.metrics, "checkpoint": result.checkpoint and result.checkpoint.path}
    except Exception as error:
        answer = {"error": str(error)}
    Path(folder, "result.json").write_text(json.dumps(answer, default=str))


def title(process: psutil.Process) -> str:
    """The name that Ray gives a process; "" for one that has ended."""
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


def guarded(act: Callable[[], None]) -> Callable[[], None]:
    """What ends the script with its traceback if it fails."""

    def run() -> None:
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)

    return run


if __name__ == "__main__":
    main()
