// What the official Go client is put through: `scenarios SCENARIO '{"topic": ...}'`.
//
// Prints facts as JSON lines on standard output and judges nothing. The client logs below $HOME.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	protocol "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

const (
	awaitDuration     = 3 * time.Second  // a poll's least time, with the request timeout of 3 s on top
	invisibleDuration = 30 * time.Second // longer than any scenario
	briefDuration     = 1 * time.Second  // for a delivery that is to expire
	delayDuration     = 4 * time.Second  // of a message that is scheduled
	waitDuration      = 40 * time.Second // for anything, on the slowest machine
	fifoGroups        = 3
	receiveMax        = 32
	shownBytes        = 40                // of a body
	longAwaitDuration = 20 * time.Second  // so that what a slow reader has asked for comes before its deadline
	consumedDuration  = 120 * time.Second // invisible while a slow reader takes what else it has asked for
)

type arguments struct {
	Endpoints []string
	Endpoint  string // of the loop, which has a name too
	Name      string
	Topic     string
	Topics    []string // of the loop
	Group     string
	Messages  int
	Receivers int
	WaitS     float64 `json:"wait_s"`
	Namespace string
	TLS       bool
	Tags      string // a filter, as Sql is
	Sql       string
	Poison    string // the body of a message that always fails
}

type fact map[string]any

var output sync.Mutex

func tell(kind string, values fact) {
	values["fact"] = kind
	line, err := json.Marshal(values)
	must(err)
	output.Lock()
	defer output.Unlock()
	_, err = fmt.Println(string(line))
	must(err)
}

func tellReceived(view *rmq.MessageView, more fact) {
	body := view.GetBody()
	values := fact{
		"id":         view.GetMessageId(),
		"topic":      view.GetTopic(),
		"tag":        view.GetTag(),
		"keys":       view.GetKeys(),
		"properties": view.GetProperties(),
		"size":       len(body),
		"sha":        sha(body),
		"body":       string(body[:min(len(body), shownBytes)]),
		"attempt":    view.GetDeliveryAttempt(),
	}
	for name, value := range more {
		values[name] = value
	}
	tell("received", values)
}

func tellError(during string, err error) {
	values := fact{"during": during, "code": nil, "text": ""}
	if err != nil {
		values["text"] = err.Error()
	}
	if status, ok := rmq.AsErrRpcStatus(err); ok {
		values["code"] = status.GetCode()
	}
	tell("error", values)
}

func sha(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func configuration(given arguments) *rmq.Config {
	return &rmq.Config{
		Endpoint:      given.Endpoints[0],
		ConsumerGroup: given.Group,
		NameSpace:     given.Namespace,
		Credentials: &credentials.SessionCredentials{
			AccessKey: os.Getenv("ROCKETMQ_ACCESS_KEY"), AccessSecret: os.Getenv("ROCKETMQ_SECRET_KEY")},
	}
}

func everything(topic string) map[string]*rmq.FilterExpression {
	return map[string]*rmq.FilterExpression{topic: rmq.SUB_ALL}
}

func wanted(given arguments) map[string]*rmq.FilterExpression {
	if given.Tags != "" {
		return map[string]*rmq.FilterExpression{given.Topic: rmq.NewFilterExpression(given.Tags)}
	}
	if given.Sql == "" {
		return everything(given.Topic)
	}
	filter := rmq.NewFilterExpressionWithType(given.Sql, rmq.SQL92)
	return map[string]*rmq.FilterExpression{given.Topic: filter}
}

func producing(given arguments, use func(rmq.Producer)) {
	producer, err := rmq.NewProducer(configuration(given), rmq.WithTopics(given.Topic))
	must(err)
	must(producer.Start())
	use(producer)
	must(producer.GracefulStop())
}

func consuming(given arguments, use func(rmq.SimpleConsumer)) {
	consumingWith(awaitDuration, given, use)
}

func consumingWith(await time.Duration, given arguments, use func(rmq.SimpleConsumer)) {
	consumer, err := rmq.NewSimpleConsumer(configuration(given),
		rmq.WithSimpleAwaitDuration(await),
		rmq.WithSimpleSubscriptionExpressions(everything(given.Topic)))
	must(err)
	must(consumer.Start())
	use(consumer)
	must(consumer.GracefulStop())
}

func send(producer rmq.Producer, message *rmq.Message) {
	receipts, err := producer.Send(context.Background(), message)
	must(err)
	tell("sent", fact{"id": receipts[0].MessageID, "sha": sha(message.Body)})
}

// receiveOnce returns nothing when nothing is there, which the client calls an error.
func receiveOnce(consumer rmq.SimpleConsumer, invisible time.Duration) []*rmq.MessageView {
	views, err := consumer.Receive(context.Background(), receiveMax, invisible)
	if status, ok := rmq.AsErrRpcStatus(err); ok && status.GetCode() == int32(protocol.Code_MESSAGE_NOT_FOUND) {
		return nil
	}
	must(err)
	return views
}

func receive(consumer rmq.SimpleConsumer, wanted int, invisible time.Duration) []*rmq.MessageView {
	var found []*rmq.MessageView
	for deadline := time.Now().Add(waitDuration); len(found) < wanted; {
		if time.Now().After(deadline) {
			must(fmt.Errorf("%d of %d messages came", len(found), wanted))
		}
		found = append(found, receiveOnce(consumer, invisible)...)
	}
	return found
}

func ack(consumer rmq.SimpleConsumer, view *rmq.MessageView) error {
	return consumer.Ack(context.Background(), view)
}

// messagesOfEveryKind are as small and as large as this client sends.
func messagesOfEveryKind(topic string) []*rmq.Message {
	plain := &rmq.Message{Topic: topic, Body: []byte("x")}
	tagged := &rmq.Message{Topic: topic, Body: []byte("tagged")}
	tagged.SetTag("tag")
	keyed := &rmq.Message{Topic: topic, Body: []byte("keyed")}
	keyed.SetKeys("key-1", "key-2")
	described := &rmq.Message{Topic: topic, Body: []byte("with properties")}
	described.AddProperty("name", "wert")
	described.AddProperty("grün", "🌊 \\ \"'")
	messages := []*rmq.Message{plain, tagged, keyed, described}
	for n, size := range []int{100, 1 << 16, 1 << 20} {
		body := make([]byte, size)
		for i := range body {
			body[i] = byte(i*7 + n)
		}
		messages = append(messages, &rmq.Message{Topic: topic, Body: body})
	}
	return messages
}

func roundTrip(given arguments) {
	messages := messagesOfEveryKind(given.Topic)
	producing(given, func(producer rmq.Producer) {
		for _, message := range messages {
			send(producer, message)
		}
	})
	consuming(given, func(consumer rmq.SimpleConsumer) {
		for _, view := range receive(consumer, len(messages), invisibleDuration) {
			tellReceived(view, nil)
			must(ack(consumer, view))
		}
		tell("left", fact{"count": len(receiveOnce(consumer, invisibleDuration))})
	})
}

// rejected sends a message with a property that is too long. This client repeats a send after any
// error.
func rejected(given arguments) {
	message := &rmq.Message{Topic: given.Topic, Body: []byte("x")}
	message.AddProperty("long", strings.Repeat("x", 40_000))
	producing(given, func(producer rmq.Producer) {
		_, err := producer.Send(context.Background(), message)
		tellError("send", err)
	})
}

// redelivery lets a delivery expire, and gives the next one back. This client's ack returns no error
// for a handle that is void, so its change of the duration tells.
func redelivery(given arguments) {
	producing(given, func(producer rmq.Producer) {
		send(producer, &rmq.Message{Topic: given.Topic, Body: []byte("expires")})
	})
	consuming(given, func(consumer rmq.SimpleConsumer) {
		first := receive(consumer, 1, briefDuration)[0]
		tellReceived(first, nil)
		second := receive(consumer, 1, invisibleDuration)[0]
		tellReceived(second, nil)
		tellError("expired", consumer.ChangeInvisibleDuration(first, invisibleDuration))
		old := second.GetReceiptHandle()
		must(consumer.ChangeInvisibleDuration(second, 2*invisibleDuration))
		tell("changed", fact{"isNew": second.GetReceiptHandle() != old})
		must(consumer.ChangeInvisibleDuration(second, 0))
		third := receive(consumer, 1, invisibleDuration)[0]
		tellReceived(third, nil)
		must(ack(consumer, third))
	})
}

func priorities(given arguments) {
	producing(given, func(producer rmq.Producer) {
		send(producer, &rmq.Message{Topic: given.Topic, Body: []byte("none")})
		for _, priority := range []int32{0, 1, 7, 100} {
			message := &rmq.Message{Topic: given.Topic, Body: []byte(fmt.Sprint(priority))}
			must(message.SetPriority(priority))
			send(producer, message)
		}
	})
	negative := &rmq.Message{Topic: given.Topic, Body: []byte("negative")}
	tellError("negative", negative.SetPriority(-1))
	consuming(given, func(consumer rmq.SimpleConsumer) {
		for _, view := range receive(consumer, 5, invisibleDuration) {
			tellReceived(view, nil)
			must(ack(consumer, view))
		}
	})
}

// push lets a listener succeed, but for the first time it sees message 2. Its graceful stop would wait
// for whole long polls, so the process ends without it.
func push(given arguments) {
	var lock sync.Mutex
	succeeded := map[string]bool{}
	done := make(chan struct{})
	consume := func(view *rmq.MessageView) rmq.ConsumerResult {
		body := string(view.GetBody())
		succeeds := body != "2" || view.GetDeliveryAttempt() > 1
		tellReceived(view, fact{"succeeds": succeeds})
		if !succeeds {
			return rmq.FAILURE
		}
		lock.Lock()
		defer lock.Unlock()
		if !succeeded[body] && len(succeeded) == given.Messages-1 {
			close(done)
		}
		succeeded[body] = true
		return rmq.SUCCESS
	}
	consumer, err := rmq.NewPushConsumer(configuration(given),
		rmq.WithPushSubscriptionExpressions(everything(given.Topic)),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: consume}))
	must(err)
	must(consumer.Start())
	producing(given, func(producer rmq.Producer) {
		for n := 0; n < given.Messages; n++ {
			send(producer, &rmq.Message{Topic: given.Topic, Body: []byte(fmt.Sprint(n))})
		}
	})
	select {
	case <-done:
	case <-time.After(waitDuration):
		must(errors.New("the messages did not arrive"))
	}
}

// pushFifo sends message groups in turn to an ordered group; the message Poison always fails.
func pushFifo(given arguments) {
	var lock sync.Mutex
	seen := map[string]bool{}
	done := make(chan struct{})
	consume := func(view *rmq.MessageView) rmq.ConsumerResult {
		body := string(view.GetBody())
		succeeds := body != given.Poison
		tellReceived(view, fact{"succeeds": succeeds})
		lock.Lock()
		defer lock.Unlock()
		if !seen[body] && len(seen) == given.Messages-1 {
			close(done)
		}
		seen[body] = true
		if succeeds {
			return rmq.SUCCESS
		}
		return rmq.FAILURE
	}
	consumer, err := rmq.NewPushConsumer(configuration(given),
		rmq.WithPushSubscriptionExpressions(everything(given.Topic)),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: consume}))
	must(err)
	must(consumer.Start())
	producing(given, func(producer rmq.Producer) {
		for n := 0; n < given.Messages; n++ {
			group := fmt.Sprintf("group-%d", n%fifoGroups)
			message := &rmq.Message{Topic: given.Topic, Body: []byte(fmt.Sprintf("%s %d", group, n))}
			message.SetMessageGroup(group)
			send(producer, message)
		}
	})
	select {
	case <-done:
		tell("done", fact{"is_done": true})
	case <-time.After(waitDuration):
		tell("done", fact{"is_done": false})
	}
	dead := given
	dead.Topic, dead.Group = "%DLQ%"+given.Group, given.Group+"-reader"
	consuming(dead, func(consumer rmq.SimpleConsumer) {
		view := receive(consumer, 1, invisibleDuration)[0]
		tellReceived(view, fact{"isDead": true})
		must(ack(consumer, view))
	})
}

// recall schedules two messages, recalls one, receives the other, and tries to recall that too late.
func recall(given arguments) {
	producing(given, func(producer rmq.Producer) {
		due := time.Now().Add(delayDuration)
		var handles []string
		for _, body := range []string{"delivered", "recalled"} {
			message := &rmq.Message{Topic: given.Topic, Body: []byte(body)}
			message.SetDelayTimestamp(due)
			receipts, err := producer.Send(context.Background(), message)
			must(err)
			handles = append(handles, receipts[0].RecallHandle)
			tell("sent", fact{"id": receipts[0].MessageID, "dueMs": due.UnixMilli()})
		}
		for range 2 {
			id, err := producer.Recall(context.Background(), given.Topic, handles[1])
			must(err)
			tell("recalled", fact{"id": id})
		}
		consuming(given, func(consumer rmq.SimpleConsumer) {
			view := receive(consumer, 1, invisibleDuration)[0]
			tellReceived(view, fact{"atMs": time.Now().UnixMilli()})
			must(ack(consumer, view))
			_, err := producer.Recall(context.Background(), given.Topic, handles[0])
			tellError("too late", err)
			tell("left", fact{"count": len(receiveOnce(consumer, invisibleDuration))})
		})
	})
}

// lite sends a message to a lite topic.
func lite(given arguments) {
	message := &rmq.Message{Topic: given.Topic, Body: []byte("x")}
	message.SetLiteTopic("one")
	producing(given, func(producer rmq.Producer) {
		_, err := producer.Send(context.Background(), message)
		tellError("send", err)
	})
}

// dedup sends messages with one dedup key.
func dedup(given arguments) {
	producing(given, func(producer rmq.Producer) {
		for _, body := range []string{"first", "first", "another"} {
			message := &rmq.Message{Topic: given.Topic, Body: []byte(body)}
			message.AddProperty("dedup-key", "k")
			receipts, err := producer.Send(context.Background(), message)
			must(err)
			tell("sent", fact{"id": receipts[0].MessageID})
		}
	})
}

// stay consumes until standard input ends; what is poison is never consumed.
func stay(given arguments) {
	consume := func(view *rmq.MessageView) rmq.ConsumerResult {
		tellReceived(view, fact{})
		if string(view.GetBody()) == "poison" {
			return rmq.FAILURE
		}
		return rmq.SUCCESS
	}
	consumer, err := rmq.NewPushConsumer(configuration(given),
		rmq.WithPushSubscriptionExpressions(wanted(given)),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: consume}))
	must(err)
	must(consumer.Start())
	tell("ready", fact{})
	_, err = io.Copy(io.Discard, os.Stdin)
	must(err)
}

// sqlPush starts a push consumer with a wrong SQL filter, and reports the error of the start.
func sqlPush(given arguments) {
	consume := func(*rmq.MessageView) rmq.ConsumerResult { return rmq.SUCCESS }
	consumer, err := rmq.NewPushConsumer(configuration(given),
		rmq.WithPushSubscriptionExpressions(wanted(given)),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: consume}))
	must(err)
	started := make(chan error, 1)
	go func() { started <- consumer.Start() }()
	select {
	case err := <-started:
		tellError("start", err)
	case <-time.After(10 * time.Second):
		tellError("start", errors.New("the start takes more than ten seconds"))
	}
}

// transaction commits one message, rolls one back, and lets the checker decide about two others.
func transaction(given arguments) {
	decided := make(chan bool, 100)
	answers := map[string]rmq.TransactionResolution{"checked yes": rmq.COMMIT, "checked no": rmq.ROLLBACK}
	check := func(view *rmq.MessageView) rmq.TransactionResolution {
		body := string(view.GetBody())
		tell("checked", fact{"body": body, "id": view.GetMessageId()})
		decided <- true
		return answers[body]
	}
	producer, err := rmq.NewProducer(configuration(given), rmq.WithTopics(given.Topic),
		rmq.WithTransactionChecker(&rmq.TransactionChecker{Check: check}))
	must(err)
	must(producer.Start())
	for _, body := range []string{"commit", "rollback", "checked yes", "checked no"} {
		started := producer.BeginTransaction()
		message := &rmq.Message{Topic: given.Topic, Body: []byte(body)}
		receipts, err := producer.SendWithTransaction(context.TODO(), message, started)
		must(err)
		tell("sent", fact{"id": receipts[0].MessageID, "transaction": receipts[0].TransactionId})
		if body == "commit" {
			must(started.Commit())
		} else if body == "rollback" {
			must(started.RollBack())
		}
	}
	isDone := true
	for range answers {
		select {
		case <-decided:
		case <-time.After(40 * time.Second):
			isDone = false
		}
	}
	tell("done", fact{"is_done": isDone})
	time.Sleep(time.Second) // For the last decision, which the client sends after the check.
	must(producer.GracefulStop())
}

// consumeAll receives and acks all that is there, with several polls at a time, and tells how calls
// ended.
func consumeAll(given arguments) {
	var lock sync.Mutex
	ids := map[string]bool{}
	ended := map[string]int{}
	received := 0
	count := func(during string, err error) {
		outcome := "OK"
		if status, ok := rmq.AsErrRpcStatus(err); ok && status.GetCode() == int32(protocol.Code_MESSAGE_NOT_FOUND) {
			outcome = "MESSAGE_NOT_FOUND"
		} else if err != nil {
			outcome = err.Error()
		}
		lock.Lock()
		defer lock.Unlock()
		ended[during+": "+outcome]++
	}
	began := time.Now()
	last := began
	deadline := began.Add(time.Duration(given.WaitS * float64(time.Second)))
	isOver := func() bool {
		lock.Lock()
		defer lock.Unlock()
		return len(ids) >= given.Messages || time.Now().After(deadline)
	}
	consumingWith(longAwaitDuration, given, func(consumer rmq.SimpleConsumer) {
		var receivers sync.WaitGroup
		for n := 0; n < given.Receivers; n++ {
			receivers.Add(1)
			go func() {
				defer receivers.Done()
				for !isOver() {
					views, err := consumer.Receive(context.Background(), receiveMax, consumedDuration)
					count("receive", err)
					for _, view := range views {
						lock.Lock()
						ids[view.GetMessageId()] = true
						received += len(view.GetBody())
						last = time.Now()
						lock.Unlock()
						count("ack", ack(consumer, view))
					}
				}
			}()
		}
		receivers.Wait()
		took := last.Sub(began).Seconds()
		tell("consumed", fact{"messages": len(ids), "bytes": received, "ended": ended, "tookS": took})
	})
}

func main() {
	scenario := map[string]func(arguments){
		"roundTrip": roundTrip, "redelivery": redelivery, "priorities": priorities, "push": push, "consumeAll": consumeAll,
		"loop": loop, "guide": guide, "stay": stay, "sqlPush": sqlPush, "rejected": rejected,
		"transaction": transaction, "pushFifo": pushFifo, "delayed": recall, "lite": lite, "dedup": dedup,
	}[os.Args[1]]
	var given arguments
	must(json.Unmarshal([]byte(os.Args[2]), &given))
	rmq.EnableSsl = given.TLS
	scenario(given)
}
