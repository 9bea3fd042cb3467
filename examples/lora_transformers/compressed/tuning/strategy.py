"""FedAvg with a loop of its own, which counts what is sent, as strategies of tuning apps do."""

from flwr.serverapp.strategy import FedAvg, Result


class CommunicationTracker:
    """Bytes of all records of the messages in each direction."""

    def __init__(self):
        self.sent = {"down": 0, "up": 0}

    def track(self, way, messages):
        """Count messages; those that hold an error have no content."""
        contents = [message.content for message in messages if message.has_content()]
        self.sent[way] += sum(record.count_bytes() for content in contents for record in content.values())


class TrackedFedAvg(FedAvg):
    """FedAvg without evaluation on clients, and with a tracker."""

    def __init__(self, **options):
        super().__init__(fraction_evaluate=0.0, **options)
        self.tracker = CommunicationTracker()

    def start(
        self,
        grid,
        initial_arrays,
        num_rounds=3,
        timeout=3600,
        train_config=None,
        evaluate_config=None,
        evaluate_fn=None,
    ):
        """Run the rounds; return the last model and the evaluations."""
        result = Result(arrays=initial_arrays)
        for server_round in range(1, num_rounds + 1):
            messages = list(self.configure_train(server_round, result.arrays, train_config, grid))
            self.tracker.track("down", messages)
            replies = list(grid.send_and_receive(messages, timeout=timeout))
            self.tracker.track("up", replies)
            arrays, metrics = self.aggregate_train(server_round, replies)
            if arrays is not None:
                result.arrays = arrays
                result.train_metrics_clientapp[server_round] = metrics
            result.evaluate_metrics_serverapp[server_round] = evaluate_fn(server_round, result.arrays)
        return result
