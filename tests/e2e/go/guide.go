package main

import (
	"context"
	"fmt"
	"os"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	protocol "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// guide is the program of docs/clients/go.md, whose blocks are the regions of this file.
func guide(arguments) {
	ctx := context.Background()

	// region: connect
	rmq.EnableSsl = true // the default; the client trusts every certificate
	config := func(group string) *rmq.Config {
		return &rmq.Config{
			Endpoint:      os.Getenv("ENDPOINT"),
			ConsumerGroup: group,
			Credentials: &credentials.SessionCredentials{
				AccessKey: os.Getenv("ACCESS_KEY"), AccessSecret: os.Getenv("ACCESS_SECRET")},
		}
	}
	producer, err := rmq.NewProducer(config(""), rmq.WithTopics("orders", "reminders", "steps"))
	must(err)
	must(producer.Start())
	// end

	// region: send
	message := &rmq.Message{Topic: "orders", Body: []byte("one coffee")}
	message.SetTag("drink")
	message.SetKeys("order-17")
	message.AddProperty("customer", "ada")
	receipts, err := producer.Send(ctx, message)
	must(err)
	fmt.Println("sent", receipts[0].MessageID)
	// end

	// region: delay
	reminder := &rmq.Message{Topic: "reminders", Body: []byte("call back")}
	reminder.SetDelayTimestamp(time.Now().Add(time.Hour))
	receipts, err = producer.Send(ctx, reminder)
	must(err)
	_, err = producer.Recall(ctx, "reminders", receipts[0].RecallHandle) // It is never delivered.
	must(err)
	// end

	// region: fifo
	for _, step := range []string{"first", "second"} {
		message := &rmq.Message{Topic: "steps", Body: []byte(step)}
		message.SetMessageGroup("order-17")
		_, err := producer.Send(ctx, message)
		must(err)
	}
	// end

	_, err = producer.Send(ctx, &rmq.Message{Topic: "orders", Body: []byte("poison")})
	must(err)

	// region: push
	consume := func(view *rmq.MessageView) rmq.ConsumerResult {
		if string(view.GetBody()) == "poison" {
			fmt.Printf("attempt %d failed: poison\n", view.GetDeliveryAttempt())
			return rmq.FAILURE // The message comes again after the back-off.
		}
		fmt.Println("done", string(view.GetBody()))
		return rmq.SUCCESS
	}
	worker, err := rmq.NewPushConsumer(config("billing"),
		rmq.WithPushSubscriptionExpressions(map[string]*rmq.FilterExpression{"orders": rmq.SUB_ALL}),
		rmq.WithPushConsumptionThreadCount(4),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: consume}))
	must(err)
	must(worker.Start())
	// end

	// region: simple
	receiveOne := func(topic, group string) *rmq.MessageView {
		consumer, err := rmq.NewSimpleConsumer(config(group),
			rmq.WithSimpleAwaitDuration(10*time.Second),
			rmq.WithSimpleSubscriptionExpressions(map[string]*rmq.FilterExpression{topic: rmq.SUB_ALL}))
		must(err)
		must(consumer.Start())
		var views []*rmq.MessageView
		for len(views) == 0 {
			views, err = consumer.Receive(ctx, 1, 30*time.Second) // invisible for 30 s
			status, ok := rmq.AsErrRpcStatus(err)
			if !ok || status.GetCode() != int32(protocol.Code_MESSAGE_NOT_FOUND) { // not an empty receive
				must(err)
			}
		}
		must(consumer.ChangeInvisibleDuration(views[0], time.Minute)) // The work takes longer.
		must(consumer.Ack(ctx, views[0]))
		must(consumer.GracefulStop())
		return views[0]
	}
	// end

	for range 2 {
		fmt.Println("step", string(receiveOne("steps", "steps").GetBody()))
	}

	// region: dead
	letter := receiveOne("%DLQ%billing", "letters")
	fmt.Println("dead letter", string(letter.GetBody()))
	// end

	// region: stop
	must(worker.GracefulStop()) // It waits for the messages in work and for a long poll.
	must(producer.GracefulStop())
	fmt.Println("stopped")
	// end
}
