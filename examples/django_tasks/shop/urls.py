"""The pages of the example: one, which takes and lists orders."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from shop.models import Order
from shop.tasks import enqueue


class UnknownCustomerError(Exception):
    """The customer is on no list."""


def orders(request: HttpRequest) -> JsonResponse:
    """Store an order with its task, or list all orders."""
    if request.method != "POST":
        return JsonResponse({"orders": list(Order.objects.order_by("id").values())})
    try:
        with transaction.atomic():
            order = Order.objects.create(
                customer=request.POST["customer"], cups=int(request.POST["cups"])
            )
            enqueue("confirm", order=order.id)
            if order.customer == "nobody":  # The rollback removes the order, and sends no task.
                raise UnknownCustomerError
    except UnknownCustomerError:
        return JsonResponse({"error": "unknown customer"}, status=422)
    return JsonResponse({"id": order.id}, status=201)


urlpatterns = [path("orders", orders)]
