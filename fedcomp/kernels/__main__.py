"""``python -m fedcomp.kernels``: compile every kernel into the disk cache and print one line."""

from fedcomp.kernels import warm

if __name__ == "__main__":
    seconds = warm()
    if seconds is None:
        print("fedcomp.kernels: numba is not installed; the numpy tier needs no compilation")
    else:
        print(f"fedcomp.kernels: all kernels ready in {seconds:.2f} s")
