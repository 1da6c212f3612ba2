package main

import (
	"bufio"
	"context"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	protocol "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

const (
	normal  = "normal"
	delayed = "delayed"
	ordered = "ordered"

	loopPause      = 150 * time.Millisecond // between two sends of a kind
	loopDelayMax   = 4 * time.Second
	loopAwait      = 5 * time.Second  // what a poll takes at least; the deadline is 3 s behind it
	loopInvisible  = 15 * time.Second // what is not acked comes back while the test waits for it
	loopReceiveMax = 16
	messageGroups  = 2
	loopReceivers  = 2 // one may wait at a topic without messages while another has some
	refusedOf      = 50
	refusedOrderOf = 250 // where order lets others wait for it
)

// looping is the client in every role at once. It tells the lines that tests/e2e/python/loop.py
// describes, and is stopped as that is.
type looping struct {
	name       string
	isStopping atomic.Bool
	refused    sync.Map
}

func nowUs() int64 { return time.Now().UnixMicro() }

// errorText is what an application sees of an error.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// refuses says whether a message is to come again: once, for some.
func (l *looping) refuses(role, topic, key string) bool {
	of := refusedOf
	if topic == ordered {
		of = refusedOrderOf
	}
	number, err := strconv.Atoi(key[strings.LastIndex(key, "/")+1:])
	must(err)
	if number%of != of-1 {
		return false
	}
	_, wasRefused := l.refused.LoadOrStore(role+" "+key, true)
	return !wasRefused
}

func (l *looping) produce(producer rmq.Producer, topic string) {
	for number := 0; ; number++ {
		time.Sleep(loopPause)
		if l.isStopping.Load() {
			return
		}
		key := fmt.Sprintf("%s/%s/%d", l.name, topic, number)
		message := &rmq.Message{Topic: topic, Body: []byte(key)}
		group, due := "", int64(0)
		switch topic {
		case ordered:
			group = fmt.Sprintf("%s-%d", l.name, number%messageGroups)
			message.SetMessageGroup(group)
		case delayed:
			at := time.Now().Add(100*time.Millisecond + time.Duration(rand.Int63n(int64(loopDelayMax))))
			due = at.UnixMilli()
			message.SetDelayTimestamp(at)
		}
		begun := nowUs()
		_, err := producer.Send(context.Background(), message)
		tell("send", fact{"key": key, "topic": topic, "group": group, "due": due,
			"begun": begun, "ended": nowUs(), "error": errorText(err)})
	}
}

func (l *looping) consume(consumer rmq.SimpleConsumer, role string) {
	for {
		begun := nowUs()
		views, err := consumer.Receive(context.Background(), loopReceiveMax, loopInvisible)
		if status, ok := rmq.AsErrRpcStatus(err); ok && status.GetCode() == int32(protocol.Code_MESSAGE_NOT_FOUND) {
			continue
		}
		if err != nil {
			tell("failed", fact{"role": role, "during": "receive", "begun": begun, "ended": nowUs(),
				"error": errorText(err)})
			time.Sleep(loopPause)
		}
		if len(views) > 0 {
			l.settle(consumer, role, views)
		}
	}
}

// settle acks what was received; behind one that is not acked nothing ordered is.
func (l *looping) settle(consumer rmq.SimpleConsumer, role string, views []*rmq.MessageView) {
	topic := views[0].GetTopic()
	keys, attempts := []string{}, []int32{}
	for _, view := range views {
		keys = append(keys, string(view.GetBody()))
		attempts = append(attempts, view.GetDeliveryAttempt())
	}
	tell("received", fact{"role": role, "topic": topic, "keys": keys, "attempts": attempts, "at": nowUs()})
	for n, view := range views {
		isAcked := !l.refuses(role, topic, keys[n]) && l.ack(consumer, role, keys[n], view)
		if !isAcked && topic == ordered {
			return
		}
	}
}

func (l *looping) ack(consumer rmq.SimpleConsumer, role, key string, view *rmq.MessageView) bool {
	begun := nowUs()
	err := ack(consumer, view)
	// This client looks at the status of the answer, and tells its application nothing of it.
	tell("ack", fact{"role": role, "topic": view.GetTopic(), "key": key, "attempt": view.GetDeliveryAttempt(),
		"begun": begun, "ended": nowUs(), "error": errorText(err), "hidden": true})
	return err == nil
}

// listen: whether its client could ack what a listener took nobody tells an application.
func (l *looping) listen(role string, view *rmq.MessageView) rmq.ConsumerResult {
	key, topic, attempt := string(view.GetBody()), view.GetTopic(), view.GetDeliveryAttempt()
	tell("received", fact{"role": role, "topic": topic, "keys": []string{key}, "attempts": []int32{attempt},
		"at": nowUs()})
	// In an ordered group this client goes on with the next message while one that failed waits for
	// its retry, so there none fails.
	if topic != ordered && l.refuses(role, topic, key) {
		return rmq.FAILURE
	}
	tell("ack", fact{"role": role, "topic": topic, "key": key, "attempt": attempt, "begun": nowUs(),
		"ended": nowUs(), "error": ""})
	return rmq.SUCCESS
}

func (l *looping) startConsumers(given arguments, prefix string, topics ...string) {
	subscriptions := map[string]*rmq.FilterExpression{}
	for _, topic := range topics {
		subscriptions[topic] = rmq.SUB_ALL
	}
	role := prefix + "simple"
	given.Group = role
	simple, err := rmq.NewSimpleConsumer(configuration(given),
		rmq.WithSimpleAwaitDuration(loopAwait),
		rmq.WithSimpleSubscriptionExpressions(subscriptions))
	must(err)
	must(simple.Start())
	for n := 0; n < loopReceivers; n++ {
		go l.consume(simple, role)
	}
	pushRole := prefix + "push"
	given.Group = pushRole
	pushed, err := rmq.NewPushConsumer(configuration(given),
		rmq.WithPushSubscriptionExpressions(subscriptions),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{
			Consume: func(view *rmq.MessageView) rmq.ConsumerResult { return l.listen(pushRole, view) },
		}))
	must(err)
	must(pushed.Start())
}

func loop(given arguments) {
	given.Endpoints = []string{given.Endpoint}
	looping := &looping{name: given.Name}
	producer, err := rmq.NewProducer(configuration(given), rmq.WithTopics(normal, delayed, ordered))
	must(err)
	must(producer.Start())
	looping.startConsumers(given, "", normal, delayed)
	looping.startConsumers(given, "ordered-", ordered)
	var producing sync.WaitGroup
	for _, topic := range []string{normal, delayed, ordered} {
		producing.Add(1)
		go func() {
			defer producing.Done()
			looping.produce(producer, topic)
		}()
	}
	tell("ready", fact{})
	input := bufio.NewScanner(os.Stdin)
	input.Scan()
	looping.isStopping.Store(true)
	producing.Wait()
	tell("stopped", fact{})
	input.Scan()
}
