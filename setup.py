"""What pyproject.toml cannot say: five folders of the repository are installed as one package, with one file in C."""

import os
import re
import tomllib
from pathlib import Path

from setuptools import Extension, find_packages, setup

BESIDE = ("strategies", "clients", "coding", "experiments")

# Where there is no compiler the package is installed without it. One file serves all versions of Python from 3.11 on.
# Operations on floating-point numbers are not to be joined into others, which round otherwise.
CONTEXTS = Extension(
    "fedcomp.kernels._contexts",
    ["fedcomp/kernels/_contexts.c"],
    extra_compile_args=[] if os.name == "nt" else ["-O3", "-ffp-contract=off"],
    py_limited_api=True,
    optional=True,
)

# README.md on a page elsewhere: what it links to in a checkout is behind the address of the sources.
SOURCE = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
README = re.sub(r"\]\((?!\w+:|#)", f"]({SOURCE}/blob/main/", Path("README.md").read_text(encoding="utf-8"))
README = re.sub(r'(?<= src=")|(?<= srcset=")', f"{SOURCE}/raw/main/", README)

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    ext_modules=[CONTEXTS],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    packages=[
        *find_packages(include=["fedcomp", "fedcomp.*"]),
        *(f"fedcomp.{found}" for name in BESIDE for found in find_packages(include=[name, f"{name}.*"])),
    ],
    package_dir={f"fedcomp.{name}": name for name in BESIDE},
    package_data={
        "fedcomp": ["py.typed", "__init__.pyi"],
        "fedcomp.experiments": [
            "app/pyproject.toml",
            "app/fedcomp_app/*.py",
            "slept_app/*",
            "slow_app/*",
            "journal_app/*",
            "wrong_clock/*",
            "node_app/*",
            "templates/*",
        ],
    },
)
