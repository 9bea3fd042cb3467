"""A strategy of the app's own."""

from flwr.serverapp.strategy import FedAvg


class Mine(FedAvg):
    """Averages, and says so."""

    def summary(self) -> None:
        """Print which class this is."""
        print(f"strategies.mine.Mine of {__file__}")
