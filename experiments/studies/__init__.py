"""Mathematics and measurements of single pages of the catalogue: functions from what rows came to, to a study."""
