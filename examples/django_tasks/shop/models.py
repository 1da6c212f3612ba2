"""The database of the example."""

from django.db import models


class Order(models.Model):
    """An order, and whether the worker has confirmed it."""

    customer = models.CharField(max_length=100)
    cups = models.PositiveIntegerField()
    is_confirmed = models.BooleanField(default=False)
