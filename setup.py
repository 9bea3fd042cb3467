"""What pyproject.toml cannot say: five folders of the repository are installed as one package."""

from setuptools import find_packages, setup

BESIDE = ("strategies", "clients", "coding", "experiments")

setup(
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
