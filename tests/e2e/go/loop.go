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
	normal       = "normal"
	delayed      = "delayed"
	ordered      = "ordered"
	transactions = "transaction"
	prioritized  = "priority"
	deduplicated = "dedup"
	filtered     = "filtered"

	// Between two sends of a kind, per kind. All languages and kinds together are a light load.
	loopPause      = 50 * time.Millisecond
	loopDelayMax   = 4 * time.Second
	loopAwait      = 5 * time.Second  // what a poll takes at least; the deadline is 3 s behind it
	loopInvisible  = 15 * time.Second // what is not acked comes back while the test waits for it
	loopReceiveMax = 16
	messageGroups  = 2
	loopPriorities = 4
	dedupKey       = "dedup-key"
	tagFilter      = "red || green"
	levels         = 10
	sqlFilter      = "level >= 5"
	// Of so many transactions, the producer commits the first and rolls back the second.
	resolvedOf     = 4
	loopReceivers  = 2 // one may wait at a topic without messages while another has some
	refusedOf      = 50
	refusedOrderOf = 250 // where order lets others wait for it
)

var tags = []string{"red", "green", "blue"}

// looping is the client in every role at once. It tells the lines that tests/e2e/python/loop.py
// describes, and is stopped as that is.
type looping struct {
	name       string
	topics     []string
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

func numberOf(key string) int {
	number, err := strconv.Atoi(key[strings.LastIndex(key, "/")+1:])
	must(err)
	return number
}

// refuses says whether a message is to come again: once, for some.
func (l *looping) refuses(role, topic, key string) bool {
	of := refusedOf
	if topic == ordered {
		of = refusedOrderOf
	}
	if numberOf(key)%of != of-1 {
		return false
	}
	_, wasRefused := l.refused.LoadOrStore(role+" "+key, true)
	return !wasRefused
}

// check decides by the number of the message.
func check(view *rmq.MessageView) rmq.TransactionResolution {
	key := string(view.GetBody())
	tell("checked", fact{"key": key})
	if numberOf(key)%2 == 0 {
		return rmq.COMMIT
	}
	return rmq.ROLLBACK
}

func (l *looping) produce(producer rmq.Producer, topic string) {
	for number := 0; ; number++ {
		time.Sleep(loopPause * time.Duration(len(l.topics)))
		if l.isStopping.Load() {
			return
		}
		l.send(producer, topic, number)
		if topic == deduplicated {
			// The application sends a dedup key again after an answer and after an error.
			l.send(producer, topic, number)
		}
	}
}

func (l *looping) send(producer rmq.Producer, topic string, number int) {
	key := fmt.Sprintf("%s/%s/%d", l.name, topic, number)
	message := &rmq.Message{Topic: topic, Body: []byte(key)}
	group, due, id := "", int64(0), ""
	switch topic {
	case ordered:
		group = fmt.Sprintf("%s-%d", l.name, number%messageGroups)
		message.SetMessageGroup(group)
	case delayed:
		at := time.Now().Add(100*time.Millisecond + time.Duration(rand.Int63n(int64(loopDelayMax))))
		due = at.UnixMilli()
		message.SetDelayTimestamp(at)
	case prioritized:
		must(message.SetPriority(int32(number % loopPriorities)))
	case deduplicated:
		message.AddProperty(dedupKey, key)
	case filtered:
		message.SetTag(tags[number%len(tags)])
		message.AddProperty("level", strconv.Itoa(number%levels))
	}
	var begun int64
	var receipts []*rmq.SendReceipt
	var err error
	var transaction rmq.Transaction
	if topic == transactions {
		transaction = producer.BeginTransaction()
		begun = nowUs()
		receipts, err = producer.SendWithTransaction(context.Background(), message, transaction)
	} else {
		begun = nowUs()
		receipts, err = producer.Send(context.Background(), message)
	}
	ended := nowUs()
	if err == nil {
		id = receipts[0].MessageID
	}
	tell("send", fact{"key": key, "topic": topic, "group": group, "due": due,
		"begun": begun, "ended": ended, "error": errorText(err), "id": id})
	if transaction != nil && err == nil {
		resolve(transaction, number)
	}
}

// resolve commits a transaction, rolls it back, or leaves it to the checker.
func resolve(transaction rmq.Transaction, number int) {
	begun := nowUs()
	var err error
	switch number % resolvedOf {
	case 0:
		err = transaction.Commit()
	case 1:
		err = transaction.RollBack()
	}
	if err != nil {
		tell("failed", fact{"role": "", "during": transactions, "begun": begun, "ended": nowUs(),
			"error": errorText(err)})
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
	keys, attempts, ids := []string{}, []int32{}, []string{}
	for _, view := range views {
		keys = append(keys, string(view.GetBody()))
		attempts = append(attempts, view.GetDeliveryAttempt())
		ids = append(ids, view.GetMessageId())
	}
	tell("received", fact{"role": role, "topic": topic, "keys": keys, "attempts": attempts, "ids": ids,
		"at": nowUs()})
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
		"ids": []string{view.GetMessageId()}, "at": nowUs()})
	// In an ordered group this client goes on with the next message while one that failed waits for
	// its retry, so there none fails.
	if topic != ordered && l.refuses(role, topic, key) {
		return rmq.FAILURE
	}
	tell("ack", fact{"role": role, "topic": topic, "key": key, "attempt": attempt, "begun": nowUs(),
		"ended": nowUs(), "error": ""})
	return rmq.SUCCESS
}

// subscriptions are the filters of each role with topics.
func (l *looping) subscriptions() map[string]map[string]*rmq.FilterExpression {
	plain := map[string]*rmq.FilterExpression{}
	roles := map[string]map[string]*rmq.FilterExpression{"simple": plain, "push": plain}
	for _, topic := range l.topics {
		switch topic {
		case ordered:
			roles["ordered-simple"] = everything(topic)
			roles["ordered-push"] = everything(topic)
		case filtered:
			bySQL := rmq.NewFilterExpressionWithType(sqlFilter, rmq.SQL92)
			roles["tag-simple"] = map[string]*rmq.FilterExpression{topic: rmq.NewFilterExpression(tagFilter)}
			roles["sql-push"] = map[string]*rmq.FilterExpression{topic: bySQL}
		default:
			plain[topic] = rmq.SUB_ALL
		}
	}
	return roles
}

func (l *looping) startConsumer(given arguments, role string, filters map[string]*rmq.FilterExpression) {
	given.Group = role
	if strings.HasSuffix(role, "push") {
		pushed, err := rmq.NewPushConsumer(configuration(given),
			rmq.WithPushSubscriptionExpressions(filters),
			rmq.WithPushMessageListener(&rmq.FuncMessageListener{
				Consume: func(view *rmq.MessageView) rmq.ConsumerResult { return l.listen(role, view) },
			}))
		must(err)
		must(pushed.Start())
		return
	}
	simple, err := rmq.NewSimpleConsumer(configuration(given),
		rmq.WithSimpleAwaitDuration(loopAwait),
		rmq.WithSimpleSubscriptionExpressions(filters))
	must(err)
	must(simple.Start())
	for n := 0; n < loopReceivers; n++ {
		go l.consume(simple, role)
	}
}

func loop(given arguments) {
	given.Endpoints = []string{given.Endpoint}
	topics := given.Topics
	if topics == nil {
		topics = []string{normal, delayed, ordered}
	}
	looping := &looping{name: given.Name, topics: topics}
	producer, err := rmq.NewProducer(configuration(given), rmq.WithTopics(topics...),
		rmq.WithTransactionChecker(&rmq.TransactionChecker{Check: check}))
	must(err)
	must(producer.Start())
	for role, filters := range looping.subscriptions() {
		looping.startConsumer(given, role, filters)
	}
	var producing sync.WaitGroup
	for _, topic := range topics {
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
