"""``python -m fedcomp.coding.kernels``: compile the kernels for this machine into the disk cache and print one line."""

from fedcomp.coding.kernels import warm

if __name__ == "__main__":
    tier, seconds = warm()
    if tier == "numpy":
        print("fedcomp.coding.kernels: numba is missing or switched off; the numpy tier needs no compilation")
    else:
        print(f"fedcomp.coding.kernels: tier {tier} ready in {seconds:.2f} s")
