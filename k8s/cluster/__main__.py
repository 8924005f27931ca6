"""A two-node Kubernetes cluster on this machine, which runs the speech pipeline from the chart.

python -m k8s.cluster up        builds Kubernetes and the images, starts the cluster and installs the release
python -m k8s.cluster campaign  disturbs the release under load, and counts failed requests and wrong outputs
python -m k8s.cluster scale     measures each phase of a scale-up from 1 to 2 replicas, cold and from the warm tier
python -m k8s.cluster certify   upgrades the release to one with certificates
python -m k8s.cluster down      removes the cluster; the built programs and images remain

Needs root on Debian 12, the packages in packages.txt, and about 30 GB of disk.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from k8s.cluster import images, scaling
from k8s.cluster.campaign import Campaign, report
from k8s.cluster.cluster import REPOSITORY, Cluster
from k8s.cluster.release import Release, push
from k8s.cluster.shell import run
from stagemesh.common.process import settings

_FOLDER = REPOSITORY / "out/cluster"
_TAG = "cluster"


def main() -> int:
    """Runs one command. Returns 1 if a request of the campaign failed or had a wrong output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("up", "campaign", "scale", "certify", "down"))
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of the campaign (default: 30)")
    parser.add_argument(
        "--clients", type=int, default=2, help="clients that send requests at the same time (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the campaign's random choices (default: 1)")
    arguments = parser.parse_args()
    cluster = Cluster(_FOLDER)
    release, warm = (Release(cluster=cluster, name=name, tag=_TAG) for name in ("speech", "warm"))
    if arguments.command == "up":
        _up(cluster, release)
    elif arguments.command == "down":
        cluster.down()
    elif arguments.command == "certify":
        release.issue_certificates()
        release.upgrade()
    elif arguments.command == "scale":
        warm.upgrade()
        found = {"cold": scaling.measure_cold(release), "warm": scaling.measure_warm(warm)}
        warm.remove()
        print(
            *(f"{kind} {phase:<14} {s:>7.2f} s" for kind, each in found.items() for phase, s in each.items()), sep="\n"
        )
        (_FOLDER / "scale.json").write_text(json.dumps(found, indent=2) + "\n")
    else:
        campaign = Campaign(release, _FOLDER, clients=arguments.clients, seed=arguments.seed)
        phases = campaign.run(minutes=arguments.minutes)
        facts: dict[str, object] = {**vars(arguments), "revision": _revision()}
        return 0 if report(phases, _FOLDER, facts) else 1
    return 0


def _up(cluster: Cluster, release: Release) -> None:
    times: dict[str, float] = {}
    begun = time.monotonic()

    def lap(name: str) -> None:
        nonlocal begun
        now = time.monotonic()
        times[name], begun = round(now - begun, 1), now
        print(f"{name}: {times[name]} s", flush=True)

    _check_packages()
    cluster.build()
    lap("Kubernetes")
    sizes = images.build(cluster.folder, tag=_TAG)
    lap("images")
    cluster.up()
    lap("cluster")
    push(cluster, list(sizes))
    lap("push")
    # The stages run as a user that cannot read the cache in the home of root.
    models = cluster.folder / "models"
    shutil.copytree(settings.models_dir(), models, dirs_exist_ok=True)
    run("chmod", "--recursive", "a+rX", str(models))
    release.remove_certificates()
    release.upgrade()
    lap("release")
    (cluster.folder / "up.json").write_text(json.dumps({"seconds": times, "image_sizes": sizes}, indent=2) + "\n")


def _check_packages() -> None:
    wanted = (Path(__file__).parent / "packages.txt").read_text().split()
    listed = run("dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\\n").splitlines()
    missing = [name for name in wanted if f"{name} installed" not in listed]
    if missing:
        sys.exit(
            f"Debian packages are missing. Install them: apt-get install --no-install-recommends {' '.join(missing)}"
        )


def _revision() -> str:
    return run("git", "rev-parse", "--short", "HEAD")


if __name__ == "__main__":
    sys.exit(main())
